"""The hidden-state store: what capture writes once and training reads many times."""
