//! By which keys an etcd is asked: files in PEM that variables of `etcdctl` name. TLS is version 1.3
//! by rustls, and the store's certificate has to be for the address that is asked.

use std::path::PathBuf;
use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem};

use super::OutsideError;

const AUTHORITY: &str = "ETCDCTL_CACERT";
const CERTIFICATE: &str = "ETCDCTL_CERT";
const KEY: &str = "ETCDCTL_KEY";

/// A variable, and the file that it names.
type Named = (&'static str, PathBuf);

/// What the variables of these names and values say.
pub(super) fn config(
    variable: impl Fn(&str) -> Result<Option<String>, OutsideError>,
) -> Result<TlsConfig, OutsideError> {
    let file = |name| variable(name).map(|path| path.map(|path| (name, PathBuf::from(path))));
    let (authority, certificate, key) = (file(AUTHORITY)?, file(CERTIFICATE)?, file(KEY)?);
    let authority = authority.ok_or_else(|| problem(format!("{AUTHORITY} is not set")))?;
    let roots = RootCerts::new_with_certs(&certificates(&authority)?);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let own = match (certificate, key) {
        (None, None) => None,
        (Some(certificate), Some(key)) => {
            let (chain, private_key) = (certificates(&certificate)?, private_key(&key)?);
            check(&chain, &private_key, &provider).map_err(|reason| named(&key, &reason))?;
            Some(ClientCert::new_with_certs(&chain, private_key))
        }
        (Some(_), None) => return Err(problem(format!("{CERTIFICATE} is set without {KEY}"))),
        (None, Some(_)) => return Err(problem(format!("{KEY} is set without {CERTIFICATE}"))),
    };
    let config = TlsConfig::builder().root_certs(roots).client_cert(own);
    Ok(config.unversioned_rustls_crypto_provider(provider).build())
}

/// Whether the key is that of the certificate; ureq would panic.
fn check(chain: &[Certificate<'_>], key: &PrivateKey<'_>, provider: &CryptoProvider) -> Result<(), String> {
    let der = |certificate: &Certificate<'_>| CertificateDer::from(certificate.der().to_vec());
    let key = PrivateKeyDer::try_from(key.der().to_vec()).map_err(str::to_owned)?;
    let certified = CertifiedKey::from_der(chain.iter().map(der).collect(), key, provider);
    certified.map(drop).map_err(|error| error.to_string())
}

fn named((variable, path): &Named, reason: &str) -> OutsideError {
    problem(format!("{variable}={} ({reason})", path.display()))
}

fn items(of: &Named) -> Result<Vec<PemItem<'static>>, OutsideError> {
    let bytes = std::fs::read(&of.1).map_err(|error| named(of, &error.to_string()))?;
    parse_pem(&bytes).map(|item| item.map_err(|error| named(of, &error.to_string()))).collect()
}

fn certificates(of: &Named) -> Result<Vec<Certificate<'static>>, OutsideError> {
    let found = items(of)?.into_iter().filter_map(|item| match item {
        PemItem::Certificate(certificate) => Some(certificate),
        _ => None,
    });
    let found: Vec<_> = found.collect();
    if found.is_empty() { Err(named(of, "it has no certificate")) } else { Ok(found) }
}

fn private_key(of: &Named) -> Result<PrivateKey<'static>, OutsideError> {
    let key = items(of)?.into_iter().find_map(|item| match item {
        PemItem::PrivateKey(key) => Some(key),
        _ => None,
    });
    key.ok_or_else(|| named(of, "it has no key"))
}

fn problem(problem: String) -> OutsideError {
    OutsideError::Access { problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_do_not_fit_are_named_with_their_variables() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/certificates/");
        let file = |name: &str| format!("{folder}{name}");
        let refused = |variables: &[(&str, String)], words: &[&str]| {
            let found = |name: &str| variables.iter().find(|(of, _)| *of == name);
            let error = config(|name| Ok(found(name).map(|(_, value)| value.clone())));
            let error = error.expect_err("one is wrong").to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{error}: {words:?}");
        };
        refused(&[], &["ETCDCTL_CACERT is not set", "set ETCDCTL_CACERT"]);
        refused(&[(AUTHORITY, file("absent.pem"))], &["ETCDCTL_CACERT=", "absent.pem", "No such file"]);
        refused(&[(AUTHORITY, file("rank.key"))], &["ETCDCTL_CACERT=", "rank.key (it has no certificate)"]);
        let authority = (AUTHORITY, file("authority.pem"));
        refused(&[authority.clone(), (CERTIFICATE, file("rank.pem"))], &["without ETCDCTL_KEY"]);
        let foreign = [authority.clone(), (CERTIFICATE, file("rank.pem")), (KEY, file("foreign.key"))];
        refused(&foreign, &["ETCDCTL_KEY=", "foreign.key", "KeyMismatch"]);
        let without_key = [authority, (CERTIFICATE, file("rank.pem")), (KEY, file("rank.pem"))];
        refused(&without_key, &["ETCDCTL_KEY=", "rank.pem (it has no key)"]);
    }
}
