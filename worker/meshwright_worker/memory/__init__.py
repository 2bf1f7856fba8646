"""What a rank does to need less of its accelerator's memory."""
