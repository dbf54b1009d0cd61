"""Facts about a model: what it is made of, which plans it can run, and how its heads are divided among processes."""
