"""Computing the tokens after a prompt: eagerly, in compiled calls, recorded or compiled as a whole."""
