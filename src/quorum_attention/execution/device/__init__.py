"""Devices, and where tensors lie: one interface, with backends for CUDA and the CPU.

Only this folder knows what kinds of devices there are.
"""
