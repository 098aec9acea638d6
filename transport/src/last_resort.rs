//! The end of the process where no other end is safe.

/// Prints why, and aborts the process.
///
/// For the few cases in which somebody may still write to memory of this process and cannot be kept
/// from it within a limit: to give the memory back would let safe code see it change. Peers see the
/// end as a loss, and go on.
pub fn abort(reason: std::fmt::Arguments<'_>) -> ! {
    tracing::error!("{reason}; the process is aborted");
    eprintln!("pleach: {reason}; the process is aborted");
    std::process::abort()
}
