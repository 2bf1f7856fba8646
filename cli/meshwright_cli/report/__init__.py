"""`meshwright report` and `meshwright open`: one page about a job, as a file or served while the job runs."""
