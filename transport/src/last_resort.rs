//! Aborts the process when no other end is safe.

/// Prints the reason, and aborts the process.
///
/// For the few cases in which a peer may still write to memory of this process and cannot be
/// stopped within a limit: if the memory were freed, safe code would see it change. Peers see a
/// loss, and go on.
pub fn abort(reason: std::fmt::Arguments<'_>) -> ! {
    tracing::error!("{reason}; the process is aborted");
    eprintln!("pleach: {reason}; the process is aborted");
    std::process::abort()
}
