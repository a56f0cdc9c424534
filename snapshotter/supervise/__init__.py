"""What the supervisor is made of beside its loop: the descriptors that outlive every process, and the upgrade."""
