"""`meshwright demo`: the whole product on one machine, with a fault in the middle."""
