"""One opening of a pool, by the process that opens it (`session`) and by one that attaches to it (`attached`)."""
