"""What several folders of tests are written with."""
