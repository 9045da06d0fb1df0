"""Shards with an index: WebDataset tar files, TFRecord and MXNet RecordIO."""
