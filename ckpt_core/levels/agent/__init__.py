"""The agent of a root: takes committed steps to the further levels, behind training and outliving it."""
