"""What a run leaves behind and what is read from it: record, settings, intervals, comparison. No torch."""
