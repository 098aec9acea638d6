//! Where bodies and codecs meet: they are tonic's to call, and share nothing but the thread or the
//! process.
//!
//! An encoder runs inside of the poll of the body that it fills, so the body says in a variable of
//! the thread for which program it is. A decoder runs after the poll of the body, maybe on another
//! thread, so accepted fields wait here under the name of their lease until it takes them.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex};

use bytes::Bytes;
use pleach_transport::mutex::lock;
use pleach_vocabulary::DataType;

use crate::endpoint::rpcs::RpcLends;
use crate::endpoint::{Endpoint, InlineReason, SharedTensor, TensorMemoryError, TensorShape};
use crate::gathered::RegisteredPart;
use crate::reference::{LeaseNumber, LinkId, Reference};

/// Lends fields of the messages of one RPC, and counts those that go inline.
pub(crate) struct Lender {
    endpoint: Endpoint,
    /// On which it lends, or why it lends nothing.
    link: Result<LinkId, InlineReason>,
    rpc: u64,
    lends: RpcLends,
}

impl Lender {
    pub(crate) fn new(endpoint: &Endpoint, link: Result<LinkId, InlineReason>, rpc: u64) -> Arc<Self> {
        Arc::new(Self { endpoint: endpoint.clone(), link, rpc, lends: RpcLends::default() })
    }

    /// The RPC is over, and lends no more, also where its body is still polled. The link, if
    /// anything was lent on it.
    pub(crate) fn end(&self) -> Option<LinkId> {
        self.link.ok().filter(|_| self.lends.end())
    }

    /// Why it lends nothing.
    pub(crate) fn refusal(&self) -> Option<InlineReason> {
        self.link.err()
    }

    /// Lends a field, if that is possible.
    pub(crate) fn lend(&self, bytes: Bytes) -> Option<(Reference, RegisteredPart)> {
        let length = bytes.len();
        let lent = self.link.and_then(|link| {
            let tensor = self.endpoint.lendable(bytes).ok_or(InlineReason::NotLendable)?;
            self.endpoint.lend_for_rpc(link, self.rpc, &self.lends, &tensor)
        });
        lent.map_err(|reason| self.field_goes_inline(length, reason)).ok()
    }

    /// The same bytes in lendable memory, where there is some; a copy, if they lie elsewhere.
    pub(crate) fn lendable(&self, bytes: Bytes) -> Bytes {
        if self.endpoint.lendable(bytes.clone()).is_some() {
            return bytes;
        }
        let copied = TensorShape::new(DataType::U8, &[bytes.len()]).and_then(|shape| {
            self.endpoint.tensor_of_bytes(&shape, |target| {
                target.copy_from_slice(&bytes);
                Ok::<(), TensorMemoryError>(())
            })
        });
        copied.map_or(bytes, SharedTensor::into_bytes)
    }

    /// Counts a field of so many bytes.
    pub(crate) fn field_goes_inline(&self, length: usize, reason: InlineReason) {
        tracing::debug!("a field of {length} bytes goes inline: {reason}");
        self.endpoint.field_goes_inline(reason, length);
    }
}

thread_local! {
    static LENDER: RefCell<Option<Arc<Lender>>> = const { RefCell::new(None) };
}

/// Calls `call`, in which encoders lend by this lender.
pub(crate) fn lending_by<R>(lender: Arc<Lender>, call: impl FnOnce() -> R) -> R {
    struct Restore(Option<Arc<Lender>>);
    impl Drop for Restore {
        fn drop(&mut self) {
            let before = self.0.take();
            LENDER.with_borrow_mut(|lender| *lender = before);
        }
    }
    let _restore = Restore(LENDER.replace(Some(lender)));
    call()
}

/// The lender of the body that is polled on this thread.
pub(crate) fn lender() -> Option<Arc<Lender>> {
    LENDER.with_borrow(Clone::clone)
}

/// The name of a field that was accepted.
pub(crate) type FieldName = (LinkId, LeaseNumber);

static ACCEPTED: LazyLock<Mutex<HashMap<FieldName, Bytes>>> = LazyLock::new(Mutex::default);

/// A field waits for its decoder.
pub(crate) fn put(name: FieldName, bytes: Bytes) {
    let before = lock(&ACCEPTED).insert(name, bytes);
    debug_assert!(before.is_none(), "a lease is accepted once");
}

/// Whether a field waits for its decoder.
pub(crate) fn waits(name: &FieldName) -> bool {
    lock(&ACCEPTED).contains_key(name)
}

/// The field, once.
pub(crate) fn take(name: &FieldName) -> Option<Bytes> {
    lock(&ACCEPTED).remove(name)
}
