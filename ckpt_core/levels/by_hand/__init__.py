"""What people start themselves: the agent of a root, one save pushed, one step pulled."""
