//! Proof of a shared secret at connect. Each side sends a random challenge and answers the other's
//! with an HMAC-SHA256 over its role, both challenges and its claim, so that nothing can be
//! replayed or reflected.
//!
//! [`Challenges`] is the one implementation: the control plane, the store and the doctor differ
//! only in the framing of challenges and answers. Where the framing allows it the listener answers
//! last, so that an unauthenticated dialer gets no proof to attack.
//!
//! This keeps other processes out. [`tls`](crate::tls) protects later bytes, and its keys are bound
//! to the claim (`docs/security.md`). Every TCP connection requires it. Without a configured
//! secret, ranks of one user on one host make one; rank 0 gives it only to processes of its user,
//! as the kernel reports. An address beyond loopback requires a configured secret.

use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hmac::{Hmac, KeyInit, Mac};
use rustix::fs::OFlags;
use sha2::Sha256;

use crate::tls::{Tls, TlsError};

/// Length of a challenge and of an answer, in bytes.
pub const TAG_BYTES: usize = 32;

/// Shortest secret that is accepted, in bytes.
pub const SECRET_BYTES_MIN: usize = 16;

/// Longest secret that is read, in bytes.
pub const SECRET_BYTES_MAX: usize = 4096;

/// A secret of all ranks of a job.
#[derive(Clone)]
pub struct Secret {
    bytes: Arc<[u8]>,
    is_of_this_host: bool,
    /// How connections are protected that the secret authenticates; `None`: as the environment
    /// says.
    tls: Option<Tls>,
}

impl fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Secret(..)")
    }
}

/// An end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The end that connected.
    Dialer,
    /// The end that was listening.
    Listener,
}

impl Side {
    fn other(self) -> Self {
        match self {
            Self::Dialer => Self::Listener,
            Self::Listener => Self::Dialer,
        }
    }
}

/// Why a secret file was not accepted.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
pub enum SecretError {
    /// It cannot be read.
    #[error("secret file {path}: cannot be read ({source}); write one with 'pleach secret {path}'")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// Other users may read it.
    #[error("secret file {path}: mode {mode:o} lets others read it; run 'chmod 600 {path}'")]
    Mode {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// It belongs to another user, who may read and change it.
    #[error(
        "secret file {path}: belongs to user {owner}, this process is of user {user}; copy it to a file of your own"
    )]
    Owner {
        /// The file.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// The user of this process.
        user: u32,
    },
    /// Not a regular file.
    #[error("secret file {path}: not a regular file; write one with 'pleach secret FILE'")]
    Kind {
        /// The file.
        path: PathBuf,
    },
    /// Too short or too long.
    #[error(
        "secret file {path}: {bytes} bytes, not {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX}; write one with 'pleach secret {path}'"
    )]
    Length {
        /// The file.
        path: PathBuf,
        /// Its length.
        bytes: u64,
    },
}

impl Secret {
    /// A secret of these bytes.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Self {
        Self { bytes: bytes.into(), is_of_this_host: false, tls: None }
    }

    /// With this protection of connections over TCP, whatever the environment says (`PLEACH_TLS`).
    #[must_use]
    pub fn with_tls(self, tls: Tls) -> Self {
        Self { tls: Some(tls), ..self }
    }

    /// The protection of connections over TCP: as given, or as the environment says.
    ///
    /// # Errors
    ///
    /// See [`TlsError`].
    pub fn tls(&self) -> Result<Tls, TlsError> {
        self.tls.clone().map_or_else(Tls::from_env, Ok)
    }

    /// A new random secret, for processes of this host: devices that other hosts can reach do not
    /// accept it.
    #[must_use]
    pub fn fresh() -> Self {
        Self::of_this_host(&challenge())
    }

    /// A secret that a process of this host has made with [`Secret::fresh`].
    pub(crate) fn of_this_host(bytes: &[u8]) -> Self {
        Self { is_of_this_host: true, ..Self::new(bytes) }
    }

    /// Whether it is only for processes of this host.
    pub(crate) fn is_of_this_host(&self) -> bool {
        self.is_of_this_host
    }

    /// Its bytes, for processes that may know it.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The secret of a part of those that have this one. Who knows this one knows it, and neither
    /// is accepted in the place of the other.
    pub(crate) fn of_part(&self, name: &str) -> Self {
        let mut mac = Hmac::<Sha256>::new_from_slice(self.as_bytes()).expect("HMAC takes keys of any length");
        // No other MAC begins so.
        mac.update(b"pleach 1 a part.");
        mac.update(name.as_bytes());
        Self { bytes: Arc::from(&mac.finalize().into_bytes()[..]), ..self.clone() }
    }

    /// The MAC of bytes that lie at a key of a store outside of the job: HMAC-SHA256 over both.
    pub(crate) fn tag_of_store(&self, key: &str, bytes: &[u8]) -> [u8; TAG_BYTES] {
        self.mac_of_store(key, bytes).finalize().into_bytes().into()
    }

    /// Whether this is their MAC, compared in constant time.
    pub(crate) fn is_tag_of_store(&self, key: &str, bytes: &[u8], tag: &[u8; TAG_BYTES]) -> bool {
        self.mac_of_store(key, bytes).verify_slice(tag).is_ok()
    }

    fn mac_of_store(&self, key: &str, bytes: &[u8]) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(self.as_bytes()).expect("HMAC takes keys of any length");
        // No challenge's MAC begins so.
        mac.update(b"pleach 1 a store");
        mac.update(&(key.len() as u64).to_le_bytes());
        mac.update(key.as_bytes());
        mac.update(bytes);
        mac
    }

    /// The contents of a regular file of this user that other users may not read; trailing white
    /// space is ignored.
    ///
    /// # Errors
    ///
    /// See [`SecretError`].
    pub fn from_file(path: &Path) -> Result<Self, SecretError> {
        let read = |source| SecretError::Read { path: path.to_owned(), source };
        // Opened once, so that the checked file is the one that is read. Without waiting: a named
        // pipe would block here.
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(read)?;
        let metadata = file.metadata().map_err(read)?;
        if !metadata.is_file() {
            return Err(SecretError::Kind { path: path.to_owned() });
        }
        let (owner, user) = (metadata.uid(), rustix::process::geteuid().as_raw());
        if owner != user {
            return Err(SecretError::Owner { path: path.to_owned(), owner, user });
        }
        let mode = metadata.mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(SecretError::Mode { path: path.to_owned(), mode });
        }
        let mut bytes = Vec::new();
        file.take(SECRET_BYTES_MAX as u64 + 1).read_to_end(&mut bytes).map_err(read)?;
        let secret = bytes.trim_ascii_end();
        if bytes.len() > SECRET_BYTES_MAX || secret.len() < SECRET_BYTES_MIN {
            return Err(SecretError::Length { path: path.to_owned(), bytes: metadata.len() });
        }
        Ok(Self::new(secret))
    }
}

/// The challenges of one handshake at one end: the input of a proof apart from the secret and the
/// claim. The one place that assigns challenges to ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Challenges {
    side: Side,
    dialer: [u8; TAG_BYTES],
    listener: [u8; TAG_BYTES],
}

impl Challenges {
    /// For the end that is `side`, which sent `own` and received `theirs`.
    #[must_use]
    pub fn new(side: Side, own: [u8; TAG_BYTES], theirs: [u8; TAG_BYTES]) -> Self {
        let (dialer, listener) = match side {
            Side::Dialer => (own, theirs),
            Side::Listener => (theirs, own),
        };
        Self { side, dialer, listener }
    }

    /// This end's answer to the other's challenge, bound to a claim (rank, world, address: whatever
    /// must not be forged). Without a secret all ends share the empty one.
    #[must_use]
    pub fn answer(&self, secret: Option<&Secret>, claim: &[u8]) -> [u8; TAG_BYTES] {
        self.mac(self.side, secret, claim).finalize().into_bytes().into()
    }

    /// Whether `answer` is the other end's for the same secret and claim, compared in constant
    /// time.
    #[must_use]
    pub fn verify(&self, secret: Option<&Secret>, claim: &[u8], answer: &[u8; TAG_BYTES]) -> bool {
        self.mac(self.side.other(), secret, claim).verify_slice(answer).is_ok()
    }

    fn mac(&self, side: Side, secret: Option<&Secret>, claim: &[u8]) -> Hmac<Sha256> {
        let key = secret.map_or(&[][..], Secret::as_bytes);
        let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
        mac.update(b"pleach 1 ");
        mac.update(match side {
            Side::Dialer => b"dialer..",
            Side::Listener => b"listener",
        });
        mac.update(&self.dialer);
        mac.update(&self.listener);
        mac.update(claim);
        mac
    }
}

/// A random challenge.
///
/// # Panics
///
/// When the kernel has no random bytes, which cannot be after boot.
#[must_use]
pub fn challenge() -> [u8; TAG_BYTES] {
    random_bytes()
}

/// A random number of the kernel.
///
/// # Panics
///
/// When the kernel has no random bytes, which cannot be after boot.
#[must_use]
pub fn random_number() -> u64 {
    u64::from_le_bytes(random_bytes())
}

/// Random bytes of the kernel, at most 256.
///
/// # Panics
///
/// When the kernel has no random bytes, which cannot be after boot.
pub(crate) fn random_bytes<const COUNT: usize>() -> [u8; COUNT] {
    let mut bytes = [0; COUNT];
    let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    assert_eq!(filled.ok(), Some(COUNT), "the kernel gives random bytes");
    bytes
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use rustix::fs::{CWD, Mode, mkfifoat};

    use super::*;
    use crate::other_user::{NOBODY, as_nobody, can_act_as_nobody};

    #[test]
    fn an_answer_holds_for_its_side_challenges_claim_and_secret_only() {
        let secret = Secret::new(b"0123456789abcdef");
        let (a, b) = ([1; TAG_BYTES], [2; TAG_BYTES]);
        let (dialer, listener) = (Challenges::new(Side::Dialer, a, b), Challenges::new(Side::Listener, b, a));
        let answer = dialer.answer(Some(&secret), b"rank 1");
        assert!(listener.verify(Some(&secret), b"rank 1", &answer));
        assert!(!dialer.verify(Some(&secret), b"rank 1", &answer), "its own answer proves nothing to an end");
        let swapped = Challenges::new(Side::Listener, a, b);
        assert!(!swapped.verify(Some(&secret), b"rank 1", &answer));
        assert!(!listener.verify(Some(&secret), b"rank 2", &answer));
        assert!(!listener.verify(None, b"rank 1", &answer));
        let answer = listener.answer(None, b"");
        assert!(dialer.verify(None, b"", &answer), "without a secret all share the empty one");
        assert!(!dialer.verify(Some(&secret), b"", &answer));
    }

    #[test]
    fn answers_are_the_same_bytes_in_every_version() {
        let secret = Secret::new(b"0123456789abcdef");
        let challenges = Challenges::new(Side::Dialer, [1; TAG_BYTES], [2; TAG_BYTES]);
        assert_eq!(
            challenges.answer(Some(&secret), b"rank 1")[..8],
            [0xd5, 0xd5, 0x5f, 0x6c, 0x0b, 0x79, 0x1c, 0x0c]
        );
    }

    /// A file that is removed after the test.
    struct SecretFile(PathBuf);

    impl SecretFile {
        fn new(name: &str, mode: u32) -> Self {
            let path = std::env::temp_dir().join(format!("pleach-auth-{name}-{}", std::process::id()));
            let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&path);
            file.and_then(|mut file| file.write_all(b"0123456789abcdef\n")).expect("a fresh file");
            Self(path)
        }
    }

    impl Drop for SecretFile {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    #[test]
    fn a_secret_file_is_a_regular_one_that_is_closed_to_others() {
        let good = SecretFile::new("good", 0o600);
        Secret::from_file(&good.0).expect("is as it should be");
        let open = SecretFile::new("open", 0o640);
        assert!(matches!(Secret::from_file(&open.0), Err(SecretError::Mode { mode: 0o640, .. })));
        let pipe = good.0.with_extension("pipe");
        mkfifoat(CWD, &pipe, Mode::RUSR | Mode::WUSR).expect("a fresh pipe");
        let refused = Secret::from_file(&pipe);
        std::fs::remove_file(&pipe).expect("it was there");
        assert!(matches!(refused, Err(SecretError::Kind { .. })), "{refused:?}");
        assert!(matches!(Secret::from_file(Path::new("/tmp")), Err(SecretError::Kind { .. })));
    }

    #[test]
    fn a_secret_file_of_another_user_is_refused_also_by_root() {
        let file = SecretFile::new("owner", 0o600);
        if !can_act_as_nobody() {
            return;
        }
        std::os::unix::fs::chown(&file.0, Some(NOBODY), None).expect("root may");
        let error = Secret::from_file(&file.0).expect_err("whose it is may have written it");
        assert!(matches!(error, SecretError::Owner { owner: NOBODY, user: 0, .. }), "{error}");
        let path = file.0.display();
        assert_eq!(
            error.to_string(),
            format!(
                "secret file {path}: belongs to user 65534, this process is of user 0; \
                 copy it to a file of your own"
            )
        );
        as_nobody(|| Secret::from_file(&file.0).map(drop)).expect("its owner reads it");
    }
}
