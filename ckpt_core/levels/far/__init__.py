"""The doors to further levels: one `Far` each, whether a directory or an object store."""
