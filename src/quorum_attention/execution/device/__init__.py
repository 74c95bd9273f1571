"""Devices and where tensors lie: one interface, with backends for CUDA, the CPU and a fake.

Nothing outside this folder asks what kind of device it has.
"""
