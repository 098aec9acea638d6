//! The `pleach` command: one file a subcommand under `cli/`.
//!
//! Standard output carries results only. Whatever goes wrong is one line on standard error,
//! `error: <what>: <who or where>; <what to do>`, with exit status 2 for what the person typed or
//! wrote and 1 for what happened or did not hold ([`cli::CommandError`]).

mod cli;
mod hypotf;

/// The runtime of `graph run` allocates tensors in registered memory through it; to everything else
/// an allocation costs one relaxed load.
#[global_allocator]
static ALLOCATOR: pleach::graph::run::TracingAllocator = pleach::graph::run::TracingAllocator;

fn main() -> std::process::ExitCode {
    cli::main()
}
