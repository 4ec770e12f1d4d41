"""What a process says of itself: its log, and counts that a monitoring system scrapes."""
