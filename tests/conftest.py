"""Its presence puts this directory on the import path, so that tests share the helpers here."""
