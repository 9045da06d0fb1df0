"""Shards: WebDataset tar files, TFRecord and MXNet RecordIO, by their index."""
