"""Shared by everything that reports: tables, pictures, pieces of HTML, and the stamp of where a number was measured."""
