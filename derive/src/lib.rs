//! `Debug` of errors, for people: a `main` that returns an error prints it by `Debug`.
//!
//! [`ErrorDebug`](macro@ErrorDebug) stands in the place of `Debug` in the derives of every public
//! error of the workspace.

use proc_macro::TokenStream;
use quote::{ToTokens, format_ident, quote};
use syn::{Data, DeriveInput, Fields, parse_macro_input};

/// `{:?}` prints the error's message, and behind it those of its sources that the message does not
/// hold already; `{:#?}` prints the fields, as `derive(Debug)` does. For types that implement
/// [`std::error::Error`].
#[proc_macro_derive(ErrorDebug)]
pub fn error_debug(input: TokenStream) -> TokenStream {
    let DeriveInput { ident, generics, data, .. } = parse_macro_input!(input as DeriveInput);
    let arms: Vec<_> = match &data {
        Data::Enum(data) => data
            .variants
            .iter()
            .map(|variant| {
                let name = &variant.ident;
                arm(quote!(Self::#name), &name.to_string(), &variant.fields)
            })
            .collect(),
        Data::Struct(data) => vec![arm(quote!(Self), &ident.to_string(), &data.fields)],
        Data::Union(_) => {
            return syn::Error::new(ident.span(), "an error is an enum or a struct")
                .to_compile_error()
                .into();
        }
    };
    let (of_impl, of_type, bounds) = generics.split_for_impl();
    quote! {
        impl #of_impl ::core::fmt::Debug for #ident #of_type #bounds {
            fn fmt(&self, formatter: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                if formatter.alternate() {
                    return match self { #(#arms)* };
                }
                let mut text = ::std::string::ToString::to_string(self);
                let mut source = ::std::error::Error::source(self);
                while let ::core::option::Option::Some(error) = source {
                    let of_source = ::std::string::ToString::to_string(error);
                    if !text.contains(&of_source) {
                        text.push_str(": ");
                        text.push_str(&of_source);
                    }
                    source = error.source();
                }
                formatter.write_str(&text)
            }
        }
    }
    .into()
}

/// The arm that prints the fields of `name`, which `path` constructs.
fn arm<P: ToTokens>(path: P, name: &str, fields: &Fields) -> impl ToTokens + use<P> {
    match fields {
        Fields::Named(fields) => {
            let names: Vec<_> = fields.named.iter().filter_map(|field| field.ident.as_ref()).collect();
            let texts = names.iter().map(|name| name.to_string());
            // Under another name: a field may be called as the formatter is.
            let values: Vec<_> = names.iter().map(|name| format_ident!("of_{name}")).collect();
            quote! {
                #path { #(#names: #values),* } => {
                    formatter.debug_struct(#name) #(.field(#texts, #values))* .finish()
                }
            }
        }
        Fields::Unnamed(fields) => {
            let values: Vec<_> =
                (0..fields.unnamed.len()).map(|number| format_ident!("of_{number}")).collect();
            quote!(#path(#(#values),*) => formatter.debug_tuple(#name) #(.field(#values))* .finish(),)
        }
        Fields::Unit => quote!(#path => formatter.write_str(#name),),
    }
}
