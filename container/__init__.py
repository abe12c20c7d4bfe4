"""The bytes layer: what a container and a checkpoint look like on disk. Imports no sibling package."""
