"""What the plugins of several trainers share: a step read in the trainer's own passes, the record, the ranks."""
