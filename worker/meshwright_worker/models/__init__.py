"""Models as torch modules, built stage by stage."""
