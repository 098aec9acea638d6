//! A build without the feature `tls`: no end ever has keys, so no value of these types exists.

use super::{CertificateFiles, Session, TlsError, TlsFault};

pub(crate) const PLAIN_BYTES_MAX: usize = 16 << 10;
pub(crate) const RECORDS_AT_ONCE: usize = 1;

enum Never {}

pub(crate) struct Ends(Never);

impl Ends {
    pub(crate) fn new(_certificates: Option<&CertificateFiles>) -> Result<Self, TlsError> {
        Err(TlsError::NotBuilt)
    }
}

pub(crate) struct TlsHandshake(Never);

impl TlsHandshake {
    pub(crate) fn dial(ends: &Ends) -> Result<Self, TlsFault> {
        match ends.0 {}
    }

    pub(crate) fn listen(ends: &Ends) -> Result<Self, TlsFault> {
        match ends.0 {}
    }

    pub(crate) fn take_outgoing(&mut self) -> Vec<u8> {
        match self.0 {}
    }

    pub(crate) fn room(&mut self) -> &mut [u8] {
        match self.0 {}
    }

    pub(crate) fn received(&mut self, _count: usize) -> Result<bool, TlsFault> {
        match self.0 {}
    }

    pub(crate) fn finish(self) -> Result<Session, TlsFault> {
        match self.0 {}
    }
}

pub(crate) struct TlsWriter(Never);

impl TlsWriter {
    pub(crate) fn seal(&mut self, _bytes: &[u8]) {
        match self.0 {}
    }

    pub(crate) fn seal_record(&mut self, _len: usize, _write: impl FnOnce(&mut [u8])) {
        match self.0 {}
    }

    pub(crate) fn waiting(&self) -> &[u8] {
        match self.0 {}
    }

    pub(crate) fn sent(&mut self, _count: usize) {
        match self.0 {}
    }

    pub(crate) fn take_waiting(&mut self) -> Vec<u8> {
        match self.0 {}
    }
}

pub(crate) struct TlsReader(Never);

impl TlsReader {
    pub(crate) fn room(&mut self, _records: usize) -> &mut [u8] {
        match self.0 {}
    }

    pub(crate) fn room_of_record(&mut self) -> &mut [u8] {
        match self.0 {}
    }

    pub(crate) fn received(&mut self, _count: usize) {
        match self.0 {}
    }

    pub(crate) fn plain(&mut self) -> Result<&[u8], TlsFault> {
        match self.0 {}
    }

    pub(crate) fn has_whole(&self) -> bool {
        match self.0 {}
    }

    pub(crate) fn take(&mut self, _count: usize) {
        match self.0 {}
    }
}
