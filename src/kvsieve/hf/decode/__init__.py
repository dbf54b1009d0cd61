"""How tokens after a prompt are computed: eagerly, with packed weights, recorded or compiled."""
