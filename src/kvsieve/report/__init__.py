"""Shared parts of reports: tables, pictures, pieces of HTML, and the environment stamp of measurements."""
