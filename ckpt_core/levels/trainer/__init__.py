"""What a process that trains has of its levels: it reads what the agent says, and never waits for it."""
