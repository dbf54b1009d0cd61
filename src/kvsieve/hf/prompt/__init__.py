"""Prefill: checks, chunks, and drivers of plans with extra passes."""
