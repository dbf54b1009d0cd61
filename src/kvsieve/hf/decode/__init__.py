"""Computing the tokens after a prompt: eagerly, with packed weights, recorded or compiled."""
