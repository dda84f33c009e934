"""What becomes of the evicted: one file a method. They are dropped, or merged into the slots that are kept."""
