"""Plans, methods by name, budgets, roles, profiles and spans of a prompt."""
