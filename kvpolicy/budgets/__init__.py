"""Layer and head budgets: how many slots each layer and head keeps."""
