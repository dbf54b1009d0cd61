"""CPU kernels in C, compiled once per machine by the installed C compiler and cached as files."""
