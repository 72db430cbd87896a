"""What tests share: models, data sets, processes, pages."""
