#include "foveal/commands.h"

int main(int argc, char** argv) { return foveal::tools::run_cli(argc, argv); }
