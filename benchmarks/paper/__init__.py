"""The experiments of the papers behind the main methods, on models and contexts of this project's size."""
