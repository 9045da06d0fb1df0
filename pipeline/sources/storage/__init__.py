"""Where bytes of shards are read from: local disks, web servers and S3."""
