"""Small models of geometries that have no small checkpoint, trained on key recall, and what methods cost on them."""
