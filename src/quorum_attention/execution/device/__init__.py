"""Devices, and where tensors lie: one interface, with backends for CUDA, the CPU and a fake.

Only this folder knows what kinds of devices there are.
"""
