"""The smaller commands of `meshwright`, one module each."""
