"""The smaller commands of `meshwright`, one per module."""
