"""Pure tensor blocks that methods are made of: scoring, pooling, selection. Imports nothing but torch."""
