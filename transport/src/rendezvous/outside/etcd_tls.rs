//! TLS 1.3 to an etcd, by rustls, with the files in PEM that variables of `etcdctl` name. The
//! certificate of the store has to be for the address that is asked. An error says what is wrong.

use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use rustls::{AlertDescription, Error};
use ureq::tls::{Certificate, ClientCert, PrivateKey, RootCerts, TlsConfig};

use crate::tls;

/// A variable, and the file that it names.
type Named<'a> = (&'static str, &'a str);

/// What the files of the authorities, of this process's certificate and of its key say.
pub(super) fn config(
    [authority, certificate, key]: [(&'static str, Option<&str>); 3],
) -> Result<TlsConfig, String> {
    let named = authority.1.map(|file| (authority.0, file));
    let named = named.ok_or_else(|| format!("{} is not set", authority.0))?;
    let roots: Vec<_> = certificates(named)?.iter().map(for_ureq).collect();
    let provider = Arc::new(tls::provider());
    let own = match (certificate, key) {
        ((_, None), (_, None)) => None,
        ((of_certificate, Some(certificate)), (of_key, Some(key))) => {
            let chain = certificates((of_certificate, certificate))?;
            let own: Vec<_> = chain.iter().map(for_ureq).collect();
            let private_key = private_key((of_key, key), chain, &provider)?;
            Some(ClientCert::new_with_certs(&own, private_key))
        }
        ((present, Some(_)), (absent, None)) | ((absent, None), (present, Some(_))) => {
            return Err(format!("{present} is set without {absent}"));
        }
    };
    let config = TlsConfig::builder().root_certs(RootCerts::new_with_certs(&roots)).client_cert(own);
    Ok(config.unversioned_rustls_crypto_provider(provider).build())
}

/// Whether another attempt has the same error: one end does not take the other's certificate or
/// version.
pub(super) fn stays(error: &Error) -> bool {
    use AlertDescription::{
        AccessDenied, BadCertificate, CertificateExpired, CertificateRequired, CertificateRevoked,
        CertificateUnknown, ProtocolVersion, UnknownCA, UnsupportedCertificate,
    };
    match error {
        Error::InvalidCertificate(_) | Error::PeerIncompatible(_) | Error::InvalidMessage(_) => true,
        Error::AlertReceived(alert) => matches!(
            alert,
            AccessDenied
                | BadCertificate
                | CertificateExpired
                | CertificateRequired
                | CertificateRevoked
                | CertificateUnknown
                | ProtocolVersion
                | UnknownCA
                | UnsupportedCertificate
        ),
        _ => false,
    }
}

fn for_ureq(certificate: &CertificateDer<'_>) -> Certificate<'static> {
    Certificate::from_der(certificate).to_owned()
}

fn wrong((variable, path): Named<'_>, reason: impl Display) -> String {
    format!("{variable}={path} ({reason})")
}

fn certificates(of: Named<'_>) -> Result<Vec<CertificateDer<'static>>, String> {
    tls::certificates_of(Path::new(of.1)).map_err(|reason| wrong(of, reason))
}

/// The key, which must be that of the certificate: ureq would panic.
fn private_key(
    of: Named<'_>,
    chain: Vec<CertificateDer<'static>>,
    provider: &CryptoProvider,
) -> Result<PrivateKey<'static>, String> {
    let bytes = std::fs::read(of.1).map_err(|error| wrong(of, error))?;
    let key = PrivateKeyDer::from_pem_slice(&bytes).map_err(|error| wrong(of, error))?;
    CertifiedKey::from_der(chain, key, provider).map_err(|error| wrong(of, error))?;
    PrivateKey::from_pem(&bytes).map_err(|error| wrong(of, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told([authority, certificate, key]: [&Option<String>; 3]) -> Result<(), String> {
        let files = [
            ("ETCDCTL_CACERT", authority.as_deref()),
            ("ETCDCTL_CERT", certificate.as_deref()),
            ("ETCDCTL_KEY", key.as_deref()),
        ];
        config(files).map(drop)
    }

    #[test]
    fn files_that_do_not_fit_are_named_with_their_variables() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/certificates/");
        let file = |name: &str| format!("{folder}{name}");
        let refused = |[authority, certificate, key]: [Option<&str>; 3], words: &[&str]| {
            let [authority, certificate, key] = [authority, certificate, key].map(|name| name.map(file));
            let error = told([&authority, &certificate, &key]).expect_err("one is wrong");
            assert!(words.iter().all(|word| error.contains(word)), "{error}: {words:?}");
        };
        refused([None, None, None], &["ETCDCTL_CACERT is not set"]);
        refused([Some("absent.pem"), None, None], &["ETCDCTL_CACERT=", "absent.pem", "No such file"]);
        refused([Some("rank.key"), None, None], &["ETCDCTL_CACERT=", "rank.key (it has no certificate)"]);
        let authority = Some("authority.pem");
        refused([authority, Some("rank.pem"), None], &["without ETCDCTL_KEY"]);
        refused([authority, None, Some("rank.key")], &["without ETCDCTL_CERT"]);
        refused([authority, Some("rank.pem"), Some("rank.pem")], &["ETCDCTL_KEY=", "rank.pem"]);
        let foreign = [authority, Some("rank.pem"), Some("foreign.key")];
        refused(foreign, &["ETCDCTL_KEY=", "foreign.key", "KeyMismatch"]);
    }

    /// A key in a form that its label does not say: refused, and no panic at the first connection.
    #[test]
    fn a_key_of_another_form_than_its_label_says_is_refused() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/certificates/");
        let text = std::fs::read_to_string(format!("{folder}rank.key")).expect("it is there");
        let path = std::env::temp_dir().join(format!("pleach-mislabelled-{}.key", std::process::id()));
        std::fs::write(&path, text.replace("PRIVATE KEY", "RSA PRIVATE KEY")).expect("can be written");
        let own = |name: &str| Some(format!("{folder}{name}"));
        let key = path.to_str().map(str::to_owned);
        let error = told([&own("authority.pem"), &own("rank.pem"), &key]).expect_err("it is no key of RSA");
        assert!(error.contains("ETCDCTL_KEY="), "{error}");
        std::fs::remove_file(path).expect("it is there");
    }
}
