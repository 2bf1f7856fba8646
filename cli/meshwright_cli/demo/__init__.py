"""`meshwright demo`: the whole product on one machine, with faults on the way."""
