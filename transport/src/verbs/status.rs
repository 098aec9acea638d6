//! The status of failed work requests, with advice.

use std::fmt;

use super::sys;

/// A failed work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WorkFailure {
    /// Its status.
    pub status: WorkStatus,
    /// Its operation.
    pub operation: Operation,
    /// This rank's queue pair, as `rdma resource show qp` lists it.
    pub queue_pair: u32,
}

impl fmt::Display for WorkFailure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { status, operation, queue_pair } = self;
        write!(formatter, "{status} [{operation} on queue pair {queue_pair} of this rank]")
    }
}

/// The operation of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// An RDMA write: a put.
    Write,
    /// An RDMA write with an immediate: a signal, perhaps with its put.
    WriteWithImmediate,
    /// An RDMA read: a get.
    Read,
    /// An atomic compare-and-swap.
    CompareSwap,
    /// An atomic fetch-and-add.
    FetchAdd,
    /// Binding a memory window: a lease.
    BindWindow,
    /// The receive of a signal.
    Receive,
    /// Another operation, or one that is no longer known.
    Other,
}

impl Operation {
    /// The operation of an opcode.
    pub(super) fn of(opcode: u32) -> Self {
        match opcode {
            sys::IBV_WR_RDMA_WRITE => Self::Write,
            sys::IBV_WR_RDMA_WRITE_WITH_IMM => Self::WriteWithImmediate,
            sys::IBV_WR_RDMA_READ => Self::Read,
            sys::IBV_WR_ATOMIC_CMP_AND_SWP => Self::CompareSwap,
            sys::IBV_WR_ATOMIC_FETCH_AND_ADD => Self::FetchAdd,
            sys::IBV_WR_BIND_MW => Self::BindWindow,
            _ => Self::Other,
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Write => "RDMA write",
            Self::WriteWithImmediate => "RDMA write with immediate",
            Self::Read => "RDMA read",
            Self::CompareSwap => "compare-and-swap",
            Self::FetchAdd => "fetch-and-add",
            Self::BindWindow => "binding of a memory window",
            Self::Receive => "receive",
            Self::Other => "work",
        })
    }
}

/// The status of a failed work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WorkStatus {
    /// No answer after all retries.
    RetriesExceeded,
    /// The peer's NIC refused the key, the range or the kind of access.
    RemoteAccess,
    /// The peer's NIC did not understand the request.
    RemoteRequest,
    /// The peer's NIC could not carry it out.
    RemoteOperation,
    /// The peer had no receive for a signal.
    ReceiverNotReady,
    /// The peer's NIC sent an answer to no request.
    BadResponse,
    /// This rank's NIC refused local memory.
    LocalProtection,
    /// A message was too long.
    LocalLength,
    /// This rank's NIC did not accept a request.
    LocalRequest,
    /// This rank's NIC did not bind a memory window.
    WindowNotBound,
    /// This rank's NIC failed.
    LocalFailure,
    /// The queue pair failed before the request was carried out.
    Flushed,
    /// Another status code of the verbs.
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
            sys::IBV_WC_BAD_RESP_ERR => Self::BadResponse,
            sys::IBV_WC_LOC_PROT_ERR | sys::IBV_WC_LOC_ACCESS_ERR => Self::LocalProtection,
            sys::IBV_WC_LOC_LEN_ERR => Self::LocalLength,
            sys::IBV_WC_LOC_QP_OP_ERR => Self::LocalRequest,
            sys::IBV_WC_MW_BIND_ERR => Self::WindowNotBound,
            sys::IBV_WC_FATAL_ERR | sys::IBV_WC_GENERAL_ERR => Self::LocalFailure,
            sys::IBV_WC_WR_FLUSH_ERR => Self::Flushed,
            other => Self::Other(other),
        }
    }
}

impl fmt::Display for WorkStatus {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::RetriesExceeded => {
                "its NIC does not answer (transport retries exceeded): is its link up, do both ends have the same MTU, does the GID's network lead there?"
            }
            Self::RemoteAccess => {
                "its NIC refused an access (remote access error): a key was stale, or a range outside its region"
            }
            Self::RemoteRequest => {
                "its NIC did not take a request (remote invalid request): do both ends run the same version and have the same MTU?"
            }
            Self::RemoteOperation => {
                "its NIC failed to carry out a request (remote operation error): look at 'dmesg' there"
            }
            Self::ReceiverNotReady => {
                "it had no receive for a signal (receiver not ready): do both ends run the same version? If so, report it"
            }
            Self::BadResponse => {
                "its NIC answered what was not asked (bad response): look at 'dmesg' and the firmware at both ends"
            }
            Self::LocalProtection => "the own NIC refused local memory (local protection error): report it",
            Self::LocalLength => "a message was too long for the NIC (local length error): report it",
            Self::LocalRequest => {
                "the own NIC did not take a request (local QP operation error): report it, with what 'dmesg' says"
            }
            Self::WindowNotBound => {
                "the own NIC bound no memory window (memory window bind error): does its region still exist?"
            }
            Self::LocalFailure => {
                "the own NIC failed (fatal or general error): look at 'dmesg', and at its firmware"
            }
            Self::Flushed => {
                "its queue pair had failed before (work flushed): look for the first error of this rank or of the peer, and at 'dmesg'"
            }
            Self::Other(status) => {
                return write!(
                    formatter,
                    "work ended with status {status} (see ibv_wc_status): look at 'dmesg' at both ends"
                );
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_of_a_reliable_connection_has_a_name_and_says_what_to_look_at() {
        // What is left are those of reliable datagrams, which nobody uses.
        let elsewhere = [
            sys::IBV_WC_LOC_EEC_OP_ERR,
            sys::IBV_WC_LOC_RDD_VIOL_ERR,
            sys::IBV_WC_INV_EECN_ERR,
            sys::IBV_WC_INV_EEC_STATE_ERR,
        ];
        for status in sys::IBV_WC_SUCCESS + 1..=sys::IBV_WC_GENERAL_ERR {
            let known = WorkStatus::of(status);
            assert_eq!(known == WorkStatus::Other(status), elsewhere.contains(&status), "{known:?}");
            let (what, look) = known.to_string().split_once("): ").map_or_else(
                || panic!("nothing to look at: {known}"),
                |(what, look)| (what.to_owned(), look.to_owned()),
            );
            assert!(what.contains('(') && look.len() > 8, "{known}");
        }
    }

    #[test]
    fn a_failure_names_operation_and_queue_pair() {
        let status = WorkStatus::RemoteAccess;
        let text = WorkFailure { status, operation: Operation::Read, queue_pair: 17 }.to_string();
        assert!(text.starts_with(&status.to_string()), "{text}");
        assert!(text.ends_with("[RDMA read on queue pair 17 of this rank]"), "{text}");
        assert_eq!(Operation::of(sys::IBV_WR_RDMA_WRITE_WITH_IMM), Operation::WriteWithImmediate);
        assert_eq!(Operation::of(sys::IBV_WR_SEND), Operation::Other);
    }
}
