"""Kernels for CPUs, in C: compiled once per machine by the C compiler that is there, and kept as a file."""
