//! What both ends of TLS show and accept.
//!
//! Without certificates an end shows a key that it has made itself and signs with it; the other
//! end takes any key. The proof of the secret that follows covers the listener's key, so a third
//! party between the two, which shows another key to the dialer, is found out by it. The key is
//! not derived from the secret: whoever dials sees it, and could try guesses of the secret on it.
//!
//! With certificates both ends also check that the other's is signed by the authority, and not
//! expired. Names in certificates are not checked: the proof of the secret says which rank it is.

use std::path::Path;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, UnbufferedClientConnection, verify_server_cert_signed_by_trust_anchor};
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, ring, verify_tls12_signature, verify_tls13_signature,
    verify_tls13_signature_with_raw_key,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{
    CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use rustls::server::{
    AlwaysResolvesServerRawPublicKeys, NoServerSessionStorage, ParsedCertificate, UnbufferedServerConnection,
    WebPkiClientVerifier,
};
use rustls::sign::CertifiedKey;
use rustls::{
    ClientConfig, DigitallySignedStruct, Error, RootCertStore, ServerConfig, SignatureScheme, version,
};
use sha2::{Digest, Sha256};

use super::{CertificateFiles, TlsError};

/// Before the 32 bytes of a private key of Ed25519 (RFC 8410, section 7).
const ED25519_PREFIX: [u8; 16] = *b"\x30\x2e\x02\x01\x00\x30\x05\x06\x03\x2b\x65\x70\x04\x22\x04\x20";

/// The two configurations of rustls.
pub(crate) struct Ends {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    /// The key or certificate that this end shows as a listener.
    identity: [u8; 32],
    /// The name for which a dialer asks, which is not sent.
    name: ServerName<'static>,
}

/// The identity of a key or certificate.
pub(crate) fn identity(shown: &[u8]) -> [u8; 32] {
    Sha256::digest(shown).into()
}

impl Ends {
    pub(crate) fn new(certificates: Option<&CertificateFiles>) -> Result<Self, TlsError> {
        let provider = Arc::new(provider());
        let (mut client, mut server, identity) = match certificates {
            None => with_fresh_key(provider)?,
            Some(files) => with_certificates(files, provider)?,
        };
        client.enable_secret_extraction = true;
        client.enable_sni = false;
        client.resumption = Resumption::disabled();
        server.enable_secret_extraction = true;
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        let name = ServerName::try_from("pleach")
            .map_err(|error| TlsError::Library { reason: error.to_string() })?;
        Ok(Self { client: Arc::new(client), server: Arc::new(server), identity, name })
    }

    /// A dialer's connection that knows no socket.
    pub(crate) fn dial(&self) -> Result<UnbufferedClientConnection, Error> {
        UnbufferedClientConnection::new(Arc::clone(&self.client), self.name.clone())
    }

    /// A listener's connection that knows no socket, and the key that it will show.
    pub(crate) fn listen(&self) -> Result<(UnbufferedServerConnection, [u8; 32]), Error> {
        Ok((UnbufferedServerConnection::new(self.server())?, self.identity))
    }

    /// For connections of rustls with buffers, too.
    pub(crate) fn server(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.server)
    }
}

/// `ring`, with the cipher first that is the fastest where the processor has AES instructions. It
/// has none for versions before TLS 1.3.
pub(crate) fn provider() -> CryptoProvider {
    use ring::cipher_suite::{
        TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256,
    };
    let cipher_suites =
        vec![TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256];
    CryptoProvider { cipher_suites, ..ring::default_provider() }
}

fn library(error: impl std::fmt::Display) -> TlsError {
    TlsError::Library { reason: error.to_string() }
}

type Configurations = (ClientConfig, ServerConfig, [u8; 32]);

fn with_fresh_key(provider: Arc<CryptoProvider>) -> Result<Configurations, TlsError> {
    let mut seed = [0; 32];
    provider.secure_random.fill(&mut seed).map_err(|_| library("no random bytes"))?;
    let private = PrivatePkcs8KeyDer::from([&ED25519_PREFIX[..], &seed].concat());
    let key = ring::sign::any_eddsa_type(&private).map_err(library)?;
    let public = key.public_key().ok_or_else(|| library("a key without its public half"))?.to_vec();
    let identity = identity(&public);
    let certified = Arc::new(CertifiedKey::new(vec![CertificateDer::from(public)], key));
    let algorithms = provider.signature_verification_algorithms;
    let client = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&version::TLS13])
        .map_err(library)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyKey { algorithms }))
        .with_no_client_auth();
    let server = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&version::TLS13])
        .map_err(library)?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(certified)));
    Ok((client, server, identity))
}

fn with_certificates(
    files: &CertificateFiles,
    provider: Arc<CryptoProvider>,
) -> Result<Configurations, TlsError> {
    let chain = certificates("PLEACH_TLS_CERT", &files.certificate)?;
    let bad =
        |variable, path: &Path, reason: String| TlsError::File { variable, path: path.to_owned(), reason };
    let key = || {
        PrivateKeyDer::from_pem_file(&files.key)
            .map_err(|error| bad("PLEACH_TLS_KEY", &files.key, error.to_string()))
    };
    let mut roots = RootCertStore::empty();
    for authority in certificates("PLEACH_TLS_CA", &files.authority)? {
        roots.add(authority).map_err(|error| bad("PLEACH_TLS_CA", &files.authority, error.to_string()))?;
    }
    let roots = Arc::new(roots);
    let identity = chain.first().map(|certificate| identity(certificate)).unwrap_or_default();
    let mismatched = |error: Error| bad("PLEACH_TLS_KEY", &files.key, error.to_string());
    let algorithms = provider.signature_verification_algorithms;
    let client = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&version::TLS13])
        .map_err(library)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Authority { roots: Arc::clone(&roots), algorithms }))
        .with_client_auth_cert(chain.clone(), key()?)
        .map_err(mismatched)?;
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider))
        .build()
        .map_err(|error| bad("PLEACH_TLS_CA", &files.authority, error.to_string()))?;
    let server = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&version::TLS13])
        .map_err(library)?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key()?)
        .map_err(mismatched)?;
    Ok((client, server, identity))
}

fn certificates(variable: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    certificates_of(path).map_err(|reason| TlsError::File { variable, path: path.to_owned(), reason })
}

/// All certificates of a file in PEM, at least one, or why there is none.
pub(crate) fn certificates_of(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let read = CertificateDer::pem_file_iter(path).map_err(|error| error.to_string())?;
    let all: Vec<_> = read.collect::<Result<_, _>>().map_err(|error| error.to_string())?;
    if all.is_empty() { Err("it has no certificate".to_owned()) } else { Ok(all) }
}

/// Takes any key of which the other end has the private half.
#[derive(Debug)]
struct AnyKey {
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerCertVerifier for AnyKey {
    fn verify_server_cert(
        &self,
        _key: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, key, signature, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let key = SubjectPublicKeyInfoDer::from(key.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

/// Takes certificates that the authority has signed, whatever names they have.
#[derive(Debug)]
struct Authority {
    roots: Arc<RootCertStore>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerCertVerifier for Authority {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let parsed = ParsedCertificate::try_from(certificate)?;
        let algorithms = self.algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&parsed, &self.roots, intermediates, now, algorithms)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signature, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}
