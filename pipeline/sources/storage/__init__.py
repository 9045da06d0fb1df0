"""Storage of shards: local disks, web servers and S3."""
