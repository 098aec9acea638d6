//! How work on a queue pair ended, in words that say what to look at.

use super::sys;

/// Why a queue pair failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WorkStatus {
    /// Nothing came back after all retries.
    RetriesExceeded,
    /// The peer's NIC refused the key, the range or the kind of access.
    RemoteAccess,
    /// The peer's NIC did not understand the request.
    RemoteRequest,
    /// The peer's NIC could not carry it out.
    RemoteOperation,
    /// The peer had no receive for a notice.
    ReceiverNotReady,
    /// The own NIC refused local memory.
    LocalProtection,
    /// A message was longer than it may be.
    LocalLength,
    /// The queue pair failed before this was carried out.
    Flushed,
    /// Another status, as the verbs number it.
    Other(u32),
}

impl WorkStatus {
    pub(super) fn of(status: u32) -> Self {
        match status {
            sys::IBV_WC_RETRY_EXC_ERR | sys::IBV_WC_RESP_TIMEOUT_ERR => Self::RetriesExceeded,
            sys::IBV_WC_REM_ACCESS_ERR => Self::RemoteAccess,
            sys::IBV_WC_REM_INV_REQ_ERR | sys::IBV_WC_REM_INV_RD_REQ_ERR => Self::RemoteRequest,
            sys::IBV_WC_REM_OP_ERR | sys::IBV_WC_REM_ABORT_ERR => Self::RemoteOperation,
            sys::IBV_WC_RNR_RETRY_EXC_ERR => Self::ReceiverNotReady,
            sys::IBV_WC_LOC_PROT_ERR | sys::IBV_WC_LOC_ACCESS_ERR => Self::LocalProtection,
            sys::IBV_WC_LOC_LEN_ERR | sys::IBV_WC_LOC_QP_OP_ERR => Self::LocalLength,
            sys::IBV_WC_WR_FLUSH_ERR => Self::Flushed,
            other => Self::Other(other),
        }
    }
}

impl std::fmt::Display for WorkStatus {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::RetriesExceeded => {
                "its NIC does not answer (transport retries exceeded): is its link up, do both ends have the same MTU, does the GID's network lead there?"
            }
            Self::RemoteAccess => {
                "its NIC refused an access (remote access error): a key was stale, or a range outside its region"
            }
            Self::RemoteRequest => "its NIC did not take a request (remote invalid request)",
            Self::RemoteOperation => "its NIC failed to carry out a request (remote operation error)",
            Self::ReceiverNotReady => "it had no receive for a notice (receiver not ready): report it",
            Self::LocalProtection => "the own NIC refused local memory (local protection error): report it",
            Self::LocalLength => "a message was too long for the NIC (local length error): report it",
            Self::Flushed => "its queue pair had failed before (work flushed)",
            Self::Other(status) => {
                return write!(formatter, "work ended with status {status} (see ibv_wc_status)");
            }
        })
    }
}
