"""`meshwright simulate`: months of a job with failures, before it runs or from the ledger of one that has run."""
